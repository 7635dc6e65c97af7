//! The checked-in bindings of libfabric and libibverbs are what bindgen makes of the installed headers, of whichever
//! version, and the parts written by hand have the sizes, offsets and values that a C compiler finds in the headers.
//!
//! `TOKENYARD_REGENERATE=1 cargo test --test rules network_ffi` rewrites them. `TOKENYARD_FABRIC_HEADERS` names a
//! folder with `rdma/fabric.h` of another version. What is missing is printed, and fails under `TOKENYARD_STRICT=1`.

use super::ffi::{compiler_headers, differs, regenerate_asked, root};
use bindgen::callbacks::{EnumVariantCustomBehavior, EnumVariantValue, IntKind, ParseCallbacks};
use std::process::Command;

/// What is taken from the headers of a library. Names are separated by spaces.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    library: &'static str,
    package: &'static str,
    headers: &'static [&'static str],
    generated: &'static str,
    /// Structs and unions, with whatever they hold.
    types: &'static str,
    /// Macros with a number.
    numbers: &'static str,
    /// Variants of named enums; the enums' further variants differ from version to version and are left out.
    variants: &'static str,
    /// Types that are not generated: they grow, or are opaque, and the module around declares those that are needed.
    by_hand: &'static str,
    hand_written: &'static str,
    /// Of what is written by hand and not in all versions: a name, and the numbers of the version that first has it.
    later: &'static [(&'static str, u32, u32)],
}

const LIBFABRIC: Wanted = Wanted {
    library: "libfabric",
    package: "libfabric-dev",
    headers: &[
        "rdma/fabric.h",
        "rdma/fi_cm.h",
        "rdma/fi_domain.h",
        "rdma/fi_endpoint.h",
        "rdma/fi_eq.h",
        "rdma/fi_rma.h",
    ],
    generated: "transport/network/libfabric/libfabric_sys/fabric.rs",
    types: "fi_info fid fid_fabric fid_domain fid_ep fid_av fid_mr fid_cq fid_eq fi_ops_rma fi_ops_msg fi_ops_cm \
            fi_ops_mr fi_ops_eq fi_context fi_context2 fi_msg fi_msg_rma fi_rma_iov fi_cq_data_entry fi_eq_attr \
            fi_eq_entry fi_eq_err_entry fi_av_attr",
    numbers: "FI_MSG FI_RMA FI_READ FI_WRITE FI_RECV FI_SEND FI_TRANSMIT FI_REMOTE_READ FI_REMOTE_WRITE FI_REMOTE_CQ_DATA \
              FI_MORE FI_COMPLETION FI_INJECT FI_INJECT_COMPLETE FI_TRANSMIT_COMPLETE FI_DELIVERY_COMPLETE FI_MULTI_RECV \
              FI_SELECTIVE_COMPLETION FI_HMEM FI_LOCAL_COMM FI_REMOTE_COMM FI_SOURCE FI_SOURCE_ERR FI_RMA_EVENT FI_AFFINITY \
              FI_CONTEXT FI_CONTEXT2 FI_MSG_PREFIX FI_RX_CQ_DATA FI_ASYNC_IOV FI_MR_LOCAL FI_MR_RAW FI_MR_VIRT_ADDR \
              FI_MR_ALLOCATED FI_MR_PROV_KEY FI_MR_MMU_NOTIFY FI_MR_RMA_EVENT FI_MR_ENDPOINT FI_MR_HMEM FI_ORDER_SAS \
              FI_ORDER_WAW",
    variants: "FI_AV_UNSPEC FI_AV_MAP FI_AV_TABLE FI_PROGRESS_UNSPEC FI_PROGRESS_AUTO FI_PROGRESS_MANUAL FI_THREAD_UNSPEC \
               FI_THREAD_SAFE FI_THREAD_DOMAIN FI_THREAD_COMPLETION FI_RM_UNSPEC FI_RM_DISABLED FI_RM_ENABLED FI_EP_UNSPEC \
               FI_EP_MSG FI_EP_DGRAM FI_EP_RDM FI_CQ_FORMAT_UNSPEC FI_CQ_FORMAT_CONTEXT FI_CQ_FORMAT_MSG FI_CQ_FORMAT_DATA \
               FI_WAIT_NONE FI_WAIT_UNSPEC FI_CQ_COND_NONE FI_HMEM_SYSTEM FI_HMEM_CUDA",
    by_hand: "fi_domain_attr fi_ep_attr fi_mr_attr fi_cq_attr fi_cq_err_entry fi_ops_domain fi_ops_av fi_ops_ep fi_ops_cq \
              fi_wait_attr fid_wait fid_pep fid_nic fi_ops_tagged fi_ops_atomic fi_ops_collective fid_mc fid_stx iovec sockaddr \
              fi_cntr_attr fi_cntr_events fi_ops_cntr fid_cntr fi_ops_wait fi_poll_attr fi_ops_poll fid_poll fi_av_set_attr \
              fid_av_set fi_domain_attr__.* fi_mr_attr__.* fi_mr_dmabuf fid_xpu_.* fi_xpu_.* fi_datatype fi_op fi_collective_op fi_atomic_attr fi_collective_attr",
    hand_written: "transport/network/libfabric/libfabric_sys/grown.rs",
    later: &[
        ("max_ep_auth_key", 1, 20),
        ("fi_mr_dmabuf", 1, 20),
        ("FI_MR_DMABUF", 1, 20),
        ("src_addr", 1, 20),
        ("hmem_data", 1, 19),
        ("page_size", 1, 22),
        ("base_mr", 2, 0),
        ("sub_mr_cnt", 2, 0),
        ("FI_PROGRESS_CONTROL_UNIFIED", 1, 21),
        ("FI_OPT_CUDA_API_PERMITTED", 1, 18),
        ("FI_OPT_SHARED_MEMORY_PERMITTED", 1, 18),
        ("FI_OPT_EFA_EMULATED_WRITE", 1, 18),
        ("FI_OPT_EFA_USE_DEVICE_RDMA", 1, 18),
        ("FI_OPT_EFA_HOMOGENEOUS_PEERS", 2, 2),
        ("FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV", 2, 5),
    ],
};

const IBVERBS: Wanted = Wanted {
    library: "libibverbs",
    package: "libibverbs-dev",
    headers: &["infiniband/verbs.h"],
    generated: "transport/network/verbs/ibverbs_sys/verbs.rs",
    types: "ibv_device ibv_context ibv_context_ops ibv_pd ibv_mr ibv_cq ibv_srq ibv_qp ibv_gid ibv_device_attr \
            ibv_qp_init_attr ibv_qp_attr ibv_srq_attr ibv_srq_init_attr ibv_send_wr ibv_recv_wr ibv_sge ibv_wc \
            ibv_async_event ibv_gid_entry ibv_global_route ibv_ah_attr ibv_qp_cap \
            ibv_access_flags ibv_send_flags ibv_qp_attr_mask ibv_wc_flags",
    numbers: "",
    variants: "IBV_QPS_RESET IBV_QPS_INIT IBV_QPS_RTR IBV_QPS_RTS IBV_QPS_SQD IBV_QPS_SQE IBV_QPS_ERR IBV_QPS_UNKNOWN \
               IBV_QPT_RC IBV_QPT_UC IBV_QPT_UD IBV_MTU_256 IBV_MTU_512 IBV_MTU_1024 IBV_MTU_2048 IBV_MTU_4096 \
               IBV_WR_RDMA_WRITE IBV_WR_RDMA_WRITE_WITH_IMM IBV_WR_SEND IBV_WR_SEND_WITH_IMM IBV_WR_RDMA_READ \
               IBV_WC_SUCCESS IBV_WC_LOC_LEN_ERR IBV_WC_LOC_QP_OP_ERR IBV_WC_LOC_PROT_ERR IBV_WC_WR_FLUSH_ERR \
               IBV_WC_BAD_RESP_ERR IBV_WC_LOC_ACCESS_ERR IBV_WC_REM_INV_REQ_ERR IBV_WC_REM_ACCESS_ERR IBV_WC_REM_OP_ERR \
               IBV_WC_RETRY_EXC_ERR IBV_WC_RNR_RETRY_EXC_ERR IBV_WC_REM_ABORT_ERR IBV_WC_FATAL_ERR \
               IBV_WC_RESP_TIMEOUT_ERR IBV_WC_GENERAL_ERR IBV_WC_SEND IBV_WC_RDMA_WRITE IBV_WC_RDMA_READ IBV_WC_RECV \
               IBV_WC_RECV_RDMA_WITH_IMM IBV_EVENT_CQ_ERR IBV_EVENT_QP_FATAL IBV_EVENT_QP_REQ_ERR IBV_EVENT_QP_ACCESS_ERR \
               IBV_EVENT_DEVICE_FATAL IBV_EVENT_PORT_ACTIVE IBV_EVENT_PORT_ERR IBV_EVENT_LID_CHANGE IBV_EVENT_GID_CHANGE \
               IBV_EVENT_SRQ_ERR IBV_EVENT_QP_LAST_WQE_REACHED IBV_NODE_CA IBV_NODE_UNKNOWN IBV_TRANSPORT_IB \
               IBV_MIG_MIGRATED IBV_ATOMIC_NONE IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_WRITE \
               IBV_ACCESS_REMOTE_READ IBV_ACCESS_RELAXED_ORDERING IBV_SEND_FENCE IBV_SEND_SIGNALED IBV_SEND_INLINE \
               IBV_QP_STATE IBV_QP_ACCESS_FLAGS IBV_QP_PKEY_INDEX IBV_QP_PORT IBV_QP_QKEY IBV_QP_AV IBV_QP_PATH_MTU \
               IBV_QP_TIMEOUT IBV_QP_RETRY_CNT IBV_QP_RNR_RETRY IBV_QP_RQ_PSN IBV_QP_MAX_QP_RD_ATOMIC IBV_QP_MIN_RNR_TIMER IBV_QP_SQ_PSN \
               IBV_QP_MAX_DEST_RD_ATOMIC IBV_QP_CAP IBV_QP_DEST_QPN IBV_WC_WITH_IMM",
    by_hand: "ibv_port_attr _compat_ibv_port_attr ibv_comp_channel ibv_ah ibv_mw ibv_mw_bind ibv_mw_type \
              _ibv_device_ops pthread_mutex_t pthread_cond_t \
              __atomic_wide_counter.* __pthread_.*",
    hand_written: "transport/network/verbs/ibverbs_sys/by_hand.rs",
    // Its headers have no version that a program could ask for, so what came later is compared by none.
    later: &[("MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT", 54, 0), ("EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE", 46, 0)],
};

impl ParseCallbacks for Wanted {
    fn int_macro(&self, name: &str, _value: i64) -> Option<IntKind> {
        // mr_mode is an int, every other word of flags 64 bits.
        Some(if name.starts_with("FI_MR_") { IntKind::I32 } else { IntKind::U64 })
    }

    fn enum_variant_behavior(
        &self,
        _enum: Option<&str>,
        variant: &str,
        _value: EnumVariantValue,
    ) -> Option<EnumVariantCustomBehavior> {
        let known = self.variants.split_whitespace().any(|name| name == variant);
        (!known).then_some(EnumVariantCustomBehavior::Hide)
    }
}

/// Prints why a test cannot run; fails where nothing may be skipped.
fn skip(why: &str) {
    assert!(std::env::var_os("TOKENYARD_STRICT").is_none_or(|strict| strict != "1"), "{why}");
    println!("skipped: {why}");
}

/// Where headers of libfabric are that shall be taken for the installed ones.
fn other_headers() -> Vec<String> {
    std::env::var("TOKENYARD_FABRIC_HEADERS").map(|folder| vec![format!("-I{folder}")]).unwrap_or_default()
}

fn includes(wanted: &Wanted) -> String {
    wanted.headers.iter().map(|header| format!("#include <{header}>\n")).collect()
}

/// Whether the headers are there, by the C compiler.
fn are_there(wanted: &Wanted) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("headers.c");
    std::fs::write(&path, includes(wanted)).unwrap();
    let found = Command::new("cc").arg("-fsyntax-only").args(other_headers()).arg(&path).output();
    if found.is_ok_and(|out| out.status.success()) {
        return true;
    }
    skip(&format!("no headers of {}, or no C compiler: install Debian's package {}", wanted.library, wanted.package));
    false
}

fn generate(wanted: Wanted) -> String {
    let names = |list: &str| list.split_whitespace().collect::<Vec<_>>().join("|");
    let bindings = bindgen::Builder::default()
        .header_contents("headers.h", &includes(&wanted))
        .clang_args(["-x", "c", "-std=gnu11"])
        .clang_args(other_headers())
        .clang_args(compiler_headers())
        .allowlist_type(names(wanted.types))
        .allowlist_var(names(wanted.numbers))
        .blocklist_type(names(wanted.by_hand))
        .raw_line("use super::*;")
        .parse_callbacks(Box::new(wanted))
        .rust_target(bindgen::RustTarget::stable(85, 0).expect("a known Rust release"))
        .rust_edition(bindgen::RustEdition::Edition2024)
        .use_core()
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(false)
        .derive_debug(false)
        .layout_tests(true)
        .generate_comments(false)
        .disable_header_comment()
        .formatter(bindgen::Formatter::Prettyplease)
        .generate()
        .expect("bindgen understands the headers");
    format!(
        "// Generated by bindgen from the headers of {} (tests/rules/network_ffi.rs); do not edit.\n{bindings}",
        wanted.library
    )
}

fn hold(wanted: Wanted) {
    if let Err(why) = clang_sys::load() {
        return skip(&format!("libclang not found ({why})"));
    }
    if !are_there(&wanted) {
        return;
    }
    let (text, path) = (generate(wanted), root().join(wanted.generated));
    if differs(&path, &text) {
        assert!(
            regenerate_asked(),
            "{} is not what bindgen makes of {}'s headers; run: TOKENYARD_REGENERATE=1 cargo test --test rules network_ffi",
            wanted.generated,
            wanted.library
        );
        std::fs::write(&path, text).expect("the generated file can be written");
        println!("wrote {}", wanted.generated);
    }
}

#[test]
fn bindings_of_libfabric_match_its_headers() {
    hold(LIBFABRIC);
}

#[test]
fn bindings_of_libibverbs_match_its_headers() {
    hold(IBVERBS);
}

/// Structs with their fields, and numbers, of a file that is written by hand. Fields that are private or room for later
/// ones are left out.
fn declared(text: &str) -> (Vec<(String, Vec<String>)>, Vec<String>) {
    let (mut structs, mut numbers): (Vec<(String, Vec<String>)>, _) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let name = |rest: &str| rest.split([':', ' ']).next().unwrap_or("").to_owned();
        if let Some(rest) = line.strip_prefix("pub struct ") {
            structs.push((name(rest), Vec::new()));
        } else if let Some(rest) = line.strip_prefix("pub const ") {
            numbers.push(name(rest));
        } else if let Some(rest) = line.strip_prefix("    ").filter(|rest| !rest.starts_with(' ')) {
            let field = rest.strip_prefix("pub ").unwrap_or(rest);
            let is_field = field.split_once(':').is_some_and(|(name, _)| {
                !["room", "_private"].contains(&name)
                    && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
            });
            if let Some((_, fields)) = structs.last_mut().filter(|_| is_field) {
                fields.push(name(field));
            }
        }
    }
    structs.retain(|(_, fields)| !fields.is_empty());
    (structs, numbers)
}

/// A C program that fails to compile unless each field has the offset, and each number the value, that Rust gives it.
fn probe(wanted: &Wanted, text: &str) -> (String, String) {
    let (structs, numbers) = declared(text);
    let (mut c, mut rust) = (String::new(), String::new());
    let guard = |name: &str, line: String| match wanted.later.iter().find(|(later, ..)| *later == name) {
        Some((_, major, minor)) => format!("#if SINCE({major}, {minor})\n{line}#endif\n"),
        None => line,
    };
    for (name, fields) in &structs {
        let mut lines = String::new();
        for field in fields {
            let in_c = if field == "type_" { "type" } else { field };
            let print = format!("printf(\"{name}.{field} %zu\\n\", offsetof(struct {name}, {in_c}));\n");
            lines += &guard(field, print);
            rust += &format!("println!(\"{name}.{field} {{}}\", std::mem::offset_of!({name}, {field}));\n");
        }
        c += &guard(name, lines);
    }
    for name in &numbers {
        c += &guard(name, format!("printf(\"{name} %lld\\n\", (long long)({name}));\n"));
        rust += &format!("println!(\"{name} {{}}\", {name} as i64);\n");
    }
    (c, rust)
}

/// What a compiled program prints, by the name before each number.
fn printed(program: &std::path::Path) -> std::collections::BTreeMap<String, String> {
    let out = Command::new(program).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    text.lines().filter_map(|line| line.split_once(' ')).map(|(a, b)| (a.to_owned(), b.to_owned())).collect()
}

/// Compares what C and Rust print of the part written by hand. `stubs` are Rust declarations that it imports.
fn hold_by_hand(wanted: Wanted, more: &[&str], stubs: &str) {
    if !are_there(&wanted) {
        return;
    }
    let text = std::fs::read_to_string(root().join(wanted.hand_written)).unwrap();
    let (c, rust) = probe(&wanted, &text);
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let more: String = more.iter().map(|header| format!("#include <{header}>\n")).collect();
    let since = "#ifdef FI_MAJOR_VERSION\n#define SINCE(a, b) (FI_MAJOR_VERSION * 1000 + FI_MINOR_VERSION >= a * 1000 + b)\n\
                 #else\n#define SINCE(a, b) 0\n#endif\n";
    let head =
        format!("#include <stdio.h>\n#include <stddef.h>\n#include <errno.h>\n{}{more}{since}", includes(&wanted));
    std::fs::write(at("probe.c"), format!("{head}int main(void) {{\n{c}return 0; }}\n")).unwrap();
    let compiled =
        Command::new("cc").arg("-w").args(other_headers()).arg("-o").arg(at("c")).arg(at("probe.c")).output();
    let compiled = compiled.unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    // The same file in a crate of its own: without doc comments and with libc's few names.
    let body = text.lines().filter(|line| !line.starts_with("//!")).collect::<Vec<_>>().join("\n");
    let body = body.replace("use super::*;", stubs);
    let allow = "#![allow(warnings)]\n";
    std::fs::write(at("probe.rs"), format!("{allow}{body}\nfn main() {{\n{rust}}}\n")).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let built =
        Command::new(rustc).args(["--edition", "2024", "-o"]).arg(at("rust")).arg(at("probe.rs")).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let (in_c, in_rust) = (printed(&at("c")), printed(&at("rust")));
    assert!(in_c.len() > 20, "{in_c:?}");
    for (name, number) in &in_c {
        assert_eq!(in_rust.get(name), Some(number), "{name}, by C on the right");
    }
}

#[test]
fn what_is_written_by_hand_of_libfabric_is_as_its_headers_have_it() {
    let generated = std::fs::read_to_string(root().join(LIBFABRIC.generated)).unwrap();
    let libc = "mod libc { pub type ssize_t = isize; #[repr(C)] pub struct iovec { a: usize, b: usize }\n\
                pub const EINTR: i32 = 4; pub const EIO: i32 = 5; pub const EAGAIN: i32 = 11; pub const ENOMEM: i32 = 12;\n\
                pub const EINVAL: i32 = 22; pub const ENOSYS: i32 = 38; pub const ENODATA: i32 = 61;\n\
                pub const EMSGSIZE: i32 = 90; pub const ENOPROTOOPT: i32 = 92; pub const EOPNOTSUPP: i32 = 95;\n\
                pub const ECONNABORTED: i32 = 103; pub const ENOTCONN: i32 = 107; pub const ECANCELED: i32 = 125; }\n\
                #[derive(PartialEq, PartialOrd)] pub struct Version(u32);\n\
                impl Version { pub fn new(_: u16, _: u16) -> Version { Version(0) } }\n";
    let stubs = format!("{libc}{}", generated.replace("use super::*;", ""));
    hold_by_hand(LIBFABRIC, &["rdma/fi_ext.h"], &stubs);
}

#[test]
fn what_is_written_by_hand_of_libibverbs_is_as_its_headers_have_it() {
    hold_by_hand(IBVERBS, &["infiniband/efadv.h"], "");
}
