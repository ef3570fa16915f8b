"""Operations measured one by one, beside their peers."""
