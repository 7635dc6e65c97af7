//! The interface: contexts and their builder, calls and their arguments, handles, placement, plans, reports.
//!
//! Place in the data path: at its head. A call checks its arguments, enqueues kernels and returns. Runs on the caller's
//! thread. Of all calls `AllToAll::counts` alone waits on the host; building and dropping a context do, too, with
//! deadlines.
//!
//! | what | file |
//! |---|---|
//! | settings of a context, and their checks | `builder`, `tuning`, `format`, `shape` |
//! | the context: building it, its calls, its end | `context`, `device_memory`, `agreement`, `open` |
//! | arguments of calls, and their checks | `calls`, `layout`, `choices`, `again`, `payload`, `needs` |
//! | what the host learns between the halves of a dispatch | `counts` |
//! | what combine needs of a dispatch | `handle` |
//! | the format of a call; calls of other formats than the context's own | `call_format`, `formats` |
//! | which rank holds which expert; tables of it for kernels | `placement`, `tables` |
//! | offsets in the arena | `plan` |
//! | how many SMs a context's calls take; which kernel a call launches | `sms`, `pick` |
//! | errors that devices and proxies report; statistics | `report`, `statistics` |

mod again;
mod agreement;
mod builder;
mod call_format;
mod calls;
mod choices;
mod context;
mod counts;
mod device_memory;
mod format;
mod formats;
mod handle;
mod layout;
mod missing;
mod needs;
mod open;
mod payload;
mod pick;
pub(crate) mod placement;
mod plan;
mod report;
mod shape;
mod sms;
mod statistics;
mod tables;
mod tuning;

pub use again::{NewRows, Placed};
pub use builder::AllToAllBuilder;
pub use call_format::{CallFormat, Weights};
pub use calls::{Combined, InPlaceOutput, Output, Rows, ScaleView, TokenCount, Tokens};
pub use choices::{IndexType, Strides};
pub use context::{AllToAll, Stats};
pub use counts::Counts;
pub use format::{Partial, RowFormat, Scales};
pub use handle::{CombineSent, Handle, Refused, Sent, SentAgain};
pub use layout::{Layout, ScaleOrder};
pub use missing::{MissingRanks, SilentRank};
pub use payload::{Payload, TokenPayload};
pub use placement::Placement;
pub use plan::{Buffer, Plan, PlanInput};
pub use shape::{FEW_BLOCKS, most_local_experts};
pub use statistics::{CallStatistics, Stage};
pub use tuning::{ArenaPlace, Tuning};
