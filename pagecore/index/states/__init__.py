"""State tables: the slots of recurrent states and of their checkpoints."""
