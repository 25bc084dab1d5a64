"""Stand-ins that only a CPU takes."""
