"""What works here and what does not, with remedies: `python -m collectives.doctor`, alone and under mpirun.

An examination is a function that yields findings, and knows nothing of the others.  `examine` runs them so that none
can harm the rest: what it raises becomes a finding, and so does taking too long.  What could end the process, such as
starting MPI or using a GPU, is done by a child with a time limit.
"""
