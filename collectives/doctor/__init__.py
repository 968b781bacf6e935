"""What works here and what does not, with remedies: `python -m collectives.doctor`, alone and under mpirun."""
