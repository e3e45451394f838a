"""Files that go to other machines: the training host's gate, the relay's receiver, the lab's templates."""
