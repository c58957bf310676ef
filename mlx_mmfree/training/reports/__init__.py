"""What shows how a run goes on, or went: pictures, figures of ternary weights, and other services."""
