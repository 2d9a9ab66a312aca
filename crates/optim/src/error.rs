//! What can be wrong with the optimizer's options.

/// An option no step can be computed with.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum HyperparameterError {
    #[error("{name} is {value}, but must be {allowed}")]
    OutOfRange { name: &'static str, value: f64, allowed: &'static str },
    #[error("unknown schedule \"{given}\": use constant, cosine, linear or wsd")]
    UnknownSchedule { given: String },
}

/// Requires a finite number of at least zero.
pub(crate) fn at_least_zero(name: &'static str, value: f64) -> Result<(), HyperparameterError> {
    require(value.is_finite() && value >= 0.0, name, value, "finite and at least 0")
}

/// Requires a number in [0, 1).
pub(crate) fn below_one(name: &'static str, value: f64) -> Result<(), HyperparameterError> {
    require((0.0..1.0).contains(&value), name, value, "at least 0 and below 1")
}

/// Requires a number in [0, 1].
pub(crate) fn ratio(name: &'static str, value: f64) -> Result<(), HyperparameterError> {
    require((0.0..=1.0).contains(&value), name, value, "between 0 and 1")
}

fn require(
    holds: bool,
    name: &'static str,
    value: f64,
    allowed: &'static str,
) -> Result<(), HyperparameterError> {
    if holds { Ok(()) } else { Err(HyperparameterError::OutOfRange { name, value, allowed }) }
}
