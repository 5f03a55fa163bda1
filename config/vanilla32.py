# the paper's vanilla baseline with 32 layers; all else is default, as in config/wm16.py
out_dir = "out/vanilla32"
dataset = "fineweb-edu"
n_layer = 32
kv = "vanilla"
