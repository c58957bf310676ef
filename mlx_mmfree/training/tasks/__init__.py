"""The tasks of runs from files: one for each kind of model."""
