"""What residual branches pass before they are added."""
