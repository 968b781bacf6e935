"""Continue a text from a checkout: the same as `python -m training.sample`.

python sample.py --from out --prompt "def "
"""

from training.sample import main

if __name__ == "__main__":
    main()
