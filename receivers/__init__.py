"""Receivers: who takes which events. See base.py for the interface and registry.py for the list."""
