"""What models learn in a run from files: one task for each kind of model."""
