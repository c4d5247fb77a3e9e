"""Reads files of torch and pickle as plain data. torch and pickle themselves would run code that the files name.

inert.py       decodes pickles into inert records
torch_save.py  finds and reads one tensor in an archive that torch.save made
dcp.py         reads folders of torch.distributed.checkpoint
"""
