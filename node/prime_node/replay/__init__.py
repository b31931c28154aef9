"""Re-execution of training steps by strangers: does each policy follow from its recipe, its batch and the state before it?"""
