"""`python -m nemo_rl_like`: the command line of `nrl`."""

from nemo_rl_like.cli.main import main

main()
