import signal

import torch

# Two threads on two busy cores wait for each other longer than one of them computes.
torch.set_num_threads(1)

# A shell may start a job in the background with these ignored, and what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
