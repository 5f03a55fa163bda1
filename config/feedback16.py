# Feedback Transformer (Fan et al., 2020), by the schedule of WhiteMatter;
# all else is default, as in config/wm16.py
out_dir = "out/feedback16"
dataset = "fineweb-edu"
kv = "feedback"
