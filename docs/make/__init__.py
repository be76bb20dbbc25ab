"""Pages of docs/ that a command writes from the code or from measured data."""
