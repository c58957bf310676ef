"""Float matrices that become ternary: by training with scales for groups, or since their values are."""
