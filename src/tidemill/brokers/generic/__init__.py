"""Calls written once, over the named records, the lists and the acts of any store."""
