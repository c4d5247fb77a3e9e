"""Files that torch and pickle would run code to open, read as data.

inert.py       pickles, decoded into inert records
torch_save.py  one tensor in an archive made by torch.save
dcp.py         folders of plain torch.distributed.checkpoint
"""
