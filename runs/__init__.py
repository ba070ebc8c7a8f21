"""The Temporal client's side: connecting, starting runs under their fixed ids, waking the pipeline."""
