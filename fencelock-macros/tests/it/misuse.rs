//! Misuse is an error of the compiler that points at the argument.

#[test]
fn misuse_is_a_compile_error_at_the_argument() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
