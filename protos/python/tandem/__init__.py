"""
Code that clients and services share: generated stubs, the error table, the engine limits, the step
link's protocol.
"""
