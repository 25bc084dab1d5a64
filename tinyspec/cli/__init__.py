"""The command line: commands in and out of lines, reports, pictures; what they share."""
