"""What is pure: schedules as data, proved, priced, drawn and simulated."""
