"""Random input for every port: messages, bytes, resumed streams and HTTP bodies."""
