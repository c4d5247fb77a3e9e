"""Reads torch and pickle files as plain data. The torch and pickle libraries would run code that the files name.

inert.py       decodes pickles into inert records
torch_save.py  finds and reads one tensor in an archive made by torch.save
dcp.py         reads torch.distributed.checkpoint folders
"""
