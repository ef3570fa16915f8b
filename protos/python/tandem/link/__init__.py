"""
The step link as pure state machines: no sockets, no threads, no clock. Both ends and the tests
share it.
"""
