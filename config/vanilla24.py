# the paper's vanilla baseline with 24 layers; all else is default, as in config/wm16.py
out_dir = "out/vanilla24"
dataset = "fineweb-edu"
n_layer = 24
kv = "vanilla"
