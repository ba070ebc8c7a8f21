"""The walk-throughs: each runs the product's own code on servers of its own, prints what it read, and judges it."""
