"""Train a GPT from a checkout; equivalent to `python -m training`.

mpirun -n 2 python train.py
"""

from training.__main__ import main

if __name__ == "__main__":
    main()
