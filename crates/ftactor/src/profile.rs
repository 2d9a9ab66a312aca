//! What a machine can do, measured once: the file that `bench` writes and `plan` reads.

use std::path::Path;

use anyhow::Context;
use compute::ComputeDtype;
use model::StateLayout;
use serde::{Deserialize, Serialize};

use crate::exit::{Refused, refuse};
use crate::machine;

const FORMAT: u32 = 1;

/// Rates per second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Profile {
    format: u32,
    /// Processor and threads.
    pub(crate) machine: String,
    pub(crate) disk: Disk,
    /// By dtype and width.
    pub(crate) compute: Vec<Compute>,
    /// By layout.
    pub(crate) optimizer: Vec<Optimizer>,
}

/// Bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Disk {
    /// Where it was measured.
    pub(crate) path: String,
    pub(crate) read: f64,
    pub(crate) write: f64,
    pub(crate) both: f64,
}

/// Operations of products of a decoder layer so wide, with all that the layer does besides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Compute {
    pub(crate) dtype: String,
    pub(crate) hidden: usize,
    pub(crate) flops: f64,
}

/// Parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Optimizer {
    pub(crate) layout: String,
    pub(crate) parameters: f64,
}

impl Profile {
    pub(crate) fn new(disk: Disk, compute: Vec<Compute>, optimizer: Vec<Optimizer>) -> Profile {
        Profile { format: FORMAT, machine: this_machine(), disk, compute, optimizer }
    }

    pub(crate) fn read(path: &Path) -> anyhow::Result<Profile> {
        let text = machine::read_text(path)?;
        let profile: Profile = toml::from_str(&text)
            .map_err(|e| Refused(format!("{} is no profile: {e}", path.display())))?;
        let rates = [profile.disk.read, profile.disk.write, profile.disk.both].into_iter();
        let rates = rates.chain(profile.compute.iter().map(|c| c.flops));
        let mut rates = rates.chain(profile.optimizer.iter().map(|o| o.parameters));
        if profile.format != FORMAT || rates.any(|rate| !(rate > 0.0 && rate.is_finite())) {
            let path = path.display();
            return refuse(format!("{path}: another format, or a rate that is none; run bench"));
        }
        Ok(profile)
    }

    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let text = toml::to_string_pretty(self).context("the profile as TOML")?;
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }

    pub(crate) fn is_of_this_machine(&self) -> bool {
        self.machine == this_machine()
    }

    /// For layers so wide: between the measured widths by their logarithms, the nearest beyond them.
    pub(crate) fn flops(&self, dtype: ComputeDtype, hidden: usize) -> Option<f64> {
        let name = dtype_name(dtype);
        let mut known: Vec<(f64, f64)> = self
            .compute
            .iter()
            .filter(|c| c.dtype == name)
            .map(|c| ((c.hidden as f64).ln(), c.flops))
            .collect();
        known.sort_by(|a, b| a.0.total_cmp(&b.0));
        let at = (hidden as f64).ln();
        let above = known.iter().position(|(width, _)| *width >= at);
        match above {
            None => known.last().map(|(_, flops)| *flops),
            Some(0) => Some(known[0].1),
            Some(i) => {
                let ((w0, f0), (w1, f1)) = (known[i - 1], known[i]);
                Some(f0 + (f1 - f0) * (at - w0) / (w1 - w0))
            }
        }
    }

    pub(crate) fn parameters(&self, layout: StateLayout) -> Option<f64> {
        let found = self.optimizer.iter().find(|o| o.layout == layout.name());
        found.map(|o| o.parameters)
    }
}

pub(crate) fn dtype_name(dtype: ComputeDtype) -> &'static str {
    match dtype {
        ComputeDtype::F32 => "f32",
        ComputeDtype::Bf16 => "bf16",
    }
}

fn this_machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name"));
    let model = model.map_or("unknown processor", |text| text.trim_start_matches(['\t', ' ', ':']));
    format!("{model}, {} threads", machine::cores())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> Profile {
        let compute = [(512, 100.0), (2048, 300.0)].map(|(hidden, flops)| Compute {
            dtype: "f32".into(),
            hidden,
            flops,
        });
        let disk = Disk { path: "/".into(), read: 2.0, write: 1.0, both: 2.5 };
        Profile::new(disk, compute.to_vec(), Vec::new())
    }

    #[test]
    fn rates_lie_between_those_measured() {
        let flops = |hidden| profile().flops(ComputeDtype::F32, hidden).unwrap();
        assert_eq!((flops(64), flops(512), flops(2048), flops(8192)), (100.0, 100.0, 300.0, 300.0));
        assert!((flops(1024) - 200.0).abs() < 1e-9);
        assert_eq!(profile().flops(ComputeDtype::Bf16, 512), None);
        assert_eq!(profile().parameters(StateLayout::F32), None);
    }

    #[test]
    fn a_profile_comes_back_from_its_file_and_a_broken_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("profile.toml");
        profile().write(&path).unwrap();
        let read = Profile::read(&path).unwrap();
        assert!(read == profile() && read.is_of_this_machine());
        for (from, to) in
            [("format = 1", "format = 2"), ("read = 2.0", "read = 0.0"), ("[disk]", "")]
        {
            let text = std::fs::read_to_string(&path).unwrap().replace(from, to);
            let other = dir.path().join("other.toml");
            std::fs::write(&other, text).unwrap();
            assert!(Profile::read(&other).is_err(), "{to}");
        }
    }
}
