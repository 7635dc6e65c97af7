//! What the doctor finds.

use serde::Serialize;

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub topic: &'static str,
    pub lacking: bool,
    pub what: String,
    /// Of a lack: what it costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<&'static str>,
    /// Of a lack: what to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<&'static str>,
}

impl Finding {
    pub fn has(topic: &'static str, what: impl Into<String>) -> Finding {
        Finding { topic, lacking: false, what: what.into(), cost: None, remedy: None }
    }

    pub fn lacks(topic: &'static str, what: impl Into<String>, cost: &'static str, remedy: &'static str) -> Finding {
        Finding { topic, lacking: true, what: what.into(), cost: Some(cost), remedy: Some(remedy) }
    }
}
