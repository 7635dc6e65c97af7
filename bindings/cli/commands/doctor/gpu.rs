//! The doctor's questions to the CUDA driver: GPUs, links between them, kinds of memory handles.
//!
//! On the main thread. No context is made: attributes can be read without one.

use super::finding::Finding;

/// Findings from the driver; one finding if there is no driver, or if this build cannot ask it.
#[cfg(not(feature = "cuda"))]
pub fn findings() -> Vec<Finding> {
    vec![Finding::lacks(
        "GPUs",
        "this build has no GPU part",
        "no GPU can be used",
        "build with the feature cuda, which is on by default",
    )]
}

/// Findings from the driver; one finding if there is no driver, or if this build cannot ask it.
#[cfg(feature = "cuda")]
pub fn findings() -> Vec<Finding> {
    with_driver::findings()
}

#[cfg(feature = "cuda")]
mod with_driver {
    use std::ffi::{CStr, c_char, c_int};

    use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
    use tokenyard::internals::base::{Result, cuda};

    use super::Finding;

    /// An attribute that is yes or no, with the cost of its lack and a remedy.
    struct Question {
        topic: &'static str,
        attribute: Attribute,
        what: &'static str,
        cost: &'static str,
        remedy: &'static str,
    }

    const QUESTIONS: [Question; 5] = [
        Question {
            topic: "memory",
            attribute: Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            what: "virtual memory management",
            cost: "no arena can be made",
            remedy: "use a GPU and driver that have it",
        },
        Question {
            topic: "memory",
            attribute: Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            what: "handles as file descriptors",
            cost: "ranks that are processes cannot share memory",
            remedy: "run ranks as threads of one process",
        },
        Question {
            topic: "memory",
            attribute: Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
            what: "fabric handles",
            cost: "a node ends at this host: memory of NVLink-connected hosts cannot be mapped",
            remedy: "nothing on one host; else start the IMEX service and make its channels",
        },
        Question {
            topic: "memory",
            attribute: Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
            what: "export as dma-buf",
            cost: "a NIC needs nvidia_peermem to reach GPU memory",
            remedy: "nothing for one node; else use the open kernel modules of the driver",
        },
        Question {
            topic: "memory",
            attribute: Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            what: "GPUDirect RDMA to managed virtual memory",
            cost: "NICs cannot write into arenas: rows between nodes would go through host memory",
            remedy: "nothing for one node; else use a data-center GPU and driver",
        },
    ];

    pub fn findings() -> Vec<Finding> {
        let count = match cuda::device_count() {
            Ok(count) if count > 0 => count,
            outcome => {
                let what = outcome.err().map_or("the driver shows no GPU".to_string(), |error| error.to_string());
                return vec![Finding::lacks(
                    "GPUs",
                    what,
                    "ranks run only on the CPU device: correct, but slow",
                    "see nvidia-smi and CUDA_VISIBLE_DEVICES",
                )];
            }
        };
        let devices: Vec<sys::CUdevice> = (0..count).filter_map(|ordinal| cuda::device(ordinal).ok()).collect();
        let mut findings: Vec<Finding> = devices.iter().enumerate().map(|(i, &device)| gpu(i, device)).collect();
        findings.push(links(&devices));
        findings.extend(QUESTIONS.iter().map(|question| ask(question, &devices)));
        findings.extend(devices.first().map(|&device| ordering(device)));
        findings
    }

    fn gpu(ordinal: usize, device: sys::CUdevice) -> Finding {
        let attribute = |which| cuda::attribute(device, which).unwrap_or(0);
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
        let what = format!(
            "{ordinal}: {}, sm_{major}{minor}, {} SMs, PCI {:04x}:{:02x}",
            name(device).unwrap_or_else(|_| "unknown".to_string()),
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID),
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID),
        );
        if major >= 9 {
            Finding::has("GPUs", what)
        } else {
            Finding::lacks("GPUs", what, "its kernels are not built: sm_90 is the oldest", "use Hopper or later")
        }
    }

    fn name(device: sys::CUdevice) -> Result<String> {
        let mut text = [0 as c_char; 128];
        // SAFETY: the driver is initialised (a device handle exists) and writes at most the length it is given.
        let code = unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as c_int, device) };
        cuda::check(code, "asking the GPU's name")?;
        // SAFETY: on success the driver ended the text with a zero inside the array.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Whether every GPU can store into every other's memory.
    fn links(devices: &[sys::CUdevice]) -> Finding {
        let pairs = || devices.iter().flat_map(|&a| devices.iter().map(move |&b| (a, b))).filter(|(a, b)| a != b);
        let can = |(a, b): (sys::CUdevice, sys::CUdevice)| {
            let mut yes: c_int = 0;
            // SAFETY: both handles are valid; `yes` outlives the call.
            let code = unsafe { sys::cuDeviceCanAccessPeer(&mut yes, a, b) };
            code == sys::CUresult::CUDA_SUCCESS && yes != 0
        };
        let (all, linked) = (pairs().count(), pairs().filter(|&pair| can(pair)).count());
        let what = format!("{linked} of {all} ordered pairs of GPUs reach each other's memory");
        if linked == all {
            return Finding::has("peer links", if all == 0 { "one GPU: none needed".to_string() } else { what });
        }
        Finding::lacks(
            "peer links",
            what,
            "GPUs that cannot reach each other cannot be ranks of one node",
            "see nvidia-smi topo -p2p w; in virtual machines pass NVLink through and start the fabric manager",
        )
    }

    fn ask(question: &Question, devices: &[sys::CUdevice]) -> Finding {
        let has = |&device: &sys::CUdevice| cuda::attribute(device, question.attribute).is_ok_and(|value| value != 0);
        if devices.iter().all(has) {
            return Finding::has(question.topic, question.what);
        }
        Finding::lacks(question.topic, format!("no {}", question.what), question.cost, question.remedy)
    }

    /// Whether the GPU orders a NIC's writes before its own reads of them.
    fn ordering(device: sys::CUdevice) -> Finding {
        let which = Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING;
        match cuda::attribute(device, which) {
            Ok(order @ 100..) => Finding::has("memory", format!("writes of NICs are ordered by the GPU ({order})")),
            _ => Finding::lacks(
                "memory",
                "writes of NICs are not ordered by the GPU",
                "each arrival from another node needs a flush: some 2 µs",
                "nothing for one node; else nothing: the flush is done where it is needed",
            ),
        }
    }
}
