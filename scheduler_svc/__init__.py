"""The CPU service: owns every request, every block table and every admission decision."""
