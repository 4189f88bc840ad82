"""Records to protobuf messages and back."""
