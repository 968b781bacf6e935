"""Schedules as data: proved, priced, drawn and simulated, without MPI."""
