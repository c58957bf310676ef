"""What commands share beside their flags."""
