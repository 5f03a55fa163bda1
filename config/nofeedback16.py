# the paper's ablation of feedback, channel l of the states up to layer l, in one pass;
# all else is default, as in config/wm16.py
out_dir = "out/nofeedback16"
dataset = "fineweb-edu"
kv = "nofeedback"
