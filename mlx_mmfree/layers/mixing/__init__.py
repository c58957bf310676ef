"""Ways of mixing positions that several token mixers use, or that one of them is too long for."""
