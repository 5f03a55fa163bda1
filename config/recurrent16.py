# Recurrent Transformer (Oncescu et al., 2026), by the schedule of WhiteMatter;
# all else is default, as in config/wm16.py
out_dir = "out/recurrent16"
dataset = "fineweb-edu"
kv = "recurrent"
