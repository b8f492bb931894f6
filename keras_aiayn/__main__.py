"""`python -m keras_aiayn` is the command `keras-aiayn`."""

from keras_aiayn.cli import main

main()
