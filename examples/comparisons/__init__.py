"""What the examples that compare models share."""
