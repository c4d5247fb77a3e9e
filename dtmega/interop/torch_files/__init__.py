"""Reads files that torch and pickle would have to run code to open, as plain data.

inert.py       decodes pickles into inert records
torch_save.py  finds and reads one tensor in an archive that torch.save made
dcp.py         reads folders of torch.distributed.checkpoint
"""
