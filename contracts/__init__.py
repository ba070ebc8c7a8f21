"""What both sides of a boundary share: names, ids, inputs, results. Imports nothing of the project."""
