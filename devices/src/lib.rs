//! Software device models that a lender can lend.
