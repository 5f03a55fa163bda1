# the paper's vanilla baseline with 16 layers; all else is default, as in config/wm16.py
out_dir = "out/vanilla16"
dataset = "fineweb-edu"
kv = "vanilla"
