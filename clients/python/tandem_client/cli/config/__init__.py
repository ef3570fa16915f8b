"""`tandem config`: settings shown, checked, suggested and judged."""
