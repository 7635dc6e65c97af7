"""`deep_ep.buffers`, where version 2 of DeepEP has its buffers."""
