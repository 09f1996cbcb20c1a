-- Choose the queues that serve an owner, and their order.

local claim, prune_a_little

do

-- Return the line whose first job comes before the first jobs of the other lines.
local function best_line(lines)
  local best, best_rank, best_member
  for _, line in ipairs(lines) do
    local head = call('ZRANGE', B .. ':r:' .. line, 0, 0, 'WITHSCORES')
    if head[1] then
      local rank = tonumber(head[2])
      if not best or rank < best_rank or rank == best_rank and number_in(head[1]) < number_in(best_member) then
        best, best_rank, best_member = line, rank, head[1]
      end
    end
  end
  return best
end

-- Take from several lines as if they were one.
local function take_lines(x, lines, many)
  if #lines == 1 then return take_line(x, lines[1], many) end
  local full = #x.leases / 2 + many
  while #x.leases / 2 < full do
    local open = {}
    for _, line in ipairs(lines) do
      if QueueLimits.is_open(sub(line, 2)) then open[#open + 1] = line end
    end
    local line = best_line(open)
    if not line then return true end
    take_line(x, line, 1)
  end
  return false
end

-- Take a fair share from every queue, until the owner has as many jobs as it wants or none are left.
local function take_fairly(x, groups, many)
  while #groups > 0 and #x.leases / 2 < many do
    local share, rest = math.max(1, math.floor((many - #x.leases / 2) / #groups)), {}
    for _, group in ipairs(groups) do
      local few = math.min(share, many - #x.leases / 2)
      if few <= 0 then return end
      local before = #x.leases
      local empty = take_lines(x, group, few)
      if #x.leases > before then x.last_queue = sub(group[1], 2) end
      if not empty then rest[#rest + 1] = group end
    end
    groups = rest
  end
end

local function end_of(kind) return '(' .. string.char(byte(kind) + 1) end

local function lines_of(kind) return call('ZRANGEBYLEX', K_LINES, '[' .. kind, end_of(kind)) end

-- Take the first suspect of the queues wanted, a task that must run alone. Nearly always there is none.
local function take_lost(x)
  local lines = {}
  for _, line in ipairs(lines_of('L')) do
    if #x.queues == 0 or x.named[sub(line, 2)] then lines[#lines + 1] = line end
  end
  if #lines > 0 then take_lines(x, lines, 1) end
end

-- The lines of the queues named, by queue, without paused queues.
local function named_lines(x, kinds)
  local groups = {}
  for _, queue in ipairs(x.queues) do
    local row = find_row(queue)
    if row and not row.paused then
      local group = {}
      for _, kind in ipairs(kinds) do group[#group + 1] = kind .. queue end
      groups[#groups + 1] = group
    end
  end
  return groups
end

-- All lines that may have ready jobs, by queue, in the order of the names.
local function listed_lines(kinds)
  local by_queue, names, groups = {}, {}, {}
  for _, kind in ipairs(kinds) do
    for _, line in ipairs(lines_of(kind)) do
      local queue = sub(line, 2)
      if not by_queue[queue] then
        by_queue[queue] = {}
        names[#names + 1] = queue
      end
      table.insert(by_queue[queue], line)
    end
  end
  table.sort(names)
  for i, queue in ipairs(names) do groups[i] = by_queue[queue] end
  return groups
end

local function after_last(x, groups)
  table.sort(groups, function(a, b) return sub(a[1], 2) < sub(b[1], 2) end)
  local turned = {}
  for _, later in ipairs({true, false}) do
    for _, group in ipairs(groups) do
      if (sub(group[1], 2) > x.last_queue) == later then turned[#turned + 1] = group end
    end
  end
  return turned
end

-- Take fairly from the queues of a kind, page by page, beginning behind the last queue served. The cost does not grow
-- with the number of queues.
local function take_from_next(x, kind, many)
  local page, last, begun_anew = math.max(many, 64), x.last_queue, false
  local from, to = '(' .. kind .. last, end_of(kind)
  while from and #x.leases / 2 < many do
    local lines, groups = call('ZRANGEBYLEX', K_LINES, from, to, 'LIMIT', 0, page), {}
    if #lines < page and not begun_anew then
      from, to, begun_anew = '[' .. kind, '[' .. kind .. last, true
      for _, line in ipairs(call('ZRANGEBYLEX', K_LINES, from, to, 'LIMIT', 0, page - #lines)) do lines[#lines + 1] = line end
    end
    for i, line in ipairs(lines) do groups[i] = {line} end
    take_fairly(x, groups, many)
    from = #lines == page and '(' .. lines[page]
  end
end

local function flat(groups)
  local lines = {}
  for _, group in ipairs(groups) do
    for _, line in ipairs(group) do lines[#lines + 1] = line end
  end
  return lines
end

-- Take from all groups in the order of the mode.
local function take_by_mode(x, groups)
  local wanted = x.wanted
  if x.mode == 0 then
    take_fairly(x, after_last(x, groups), wanted)
  elseif x.mode == 2 then
    if #groups > 0 then take_lines(x, flat(groups), wanted - #x.leases / 2) end
  else
    for _, group in ipairs(groups) do
      if #x.leases / 2 < wanted then take_lines(x, group, wanted - #x.leases / 2) end
    end
  end
end

-- Show the lease that a put made while the owner slept, if no step has confirmed it. The job goes back if the owner no longer
-- takes such a job, and if the owner has had a higher token: a server that lost its last writes has drawn this token.
local function fetch_handed(x)
  local token = x.unheard
  local id = call('HGET', x.leases_key, text_of(token))
  local j = id and load_job(id)
  if not j or j.token ~= token then return end
  local takes = not x.moved and x.wanted > 0 and (#x.queues == 0 or x.named[j.queue])
  if takes and token > x.highest_token and not flagged(j.flags, CANCELLING) then
    show_lease(x, j, token, 0, call('HGET', K_ENV, id), j.leased)
    x.first_token, x.last_token = token, token
  else
    close_attempt(j, x.worker, died(Outcome.RELEASE, NOT_STARTED))
  end
end

-- Lease as many jobs as the owner wants.
function claim(x)
  local kinds, groups = {}, {}
  x.kinds = kinds
  if x.unheard then fetch_handed(x) end
  if not x.has_want or x.moved then return end
  if flagged(x.kind_bits, 1) then kinds[#kinds + 1] = 'T' end
  if flagged(x.kind_bits, 2) then kinds[#kinds + 1] = 'M' end
  if x.wanted > #x.leases / 2 and flagged(x.kind_bits, 4) then take_lost(x) end
  local only = x.mode == 0 and #x.queues == 0 and #kinds == 1 and kinds[1]
  if not only then groups = #x.queues > 0 and named_lines(x, kinds) or listed_lines(kinds) end
  if flagged(x.kind_bits, 4) then kinds[#kinds + 1] = 'L' end
  if x.wanted > #x.leases / 2 then
    if only then take_from_next(x, only, x.wanted) else take_by_mode(x, groups) end
  end
  if #x.leases / 2 >= x.wanted and #kinds > 0 then -- pass the hint on: jobs may be left for another owner
    local rest = flat(groups)
    for _, queue in ipairs(x.queues) do rest[#rest + 1] = 'L' .. queue end
    ring_rest(#x.queues > 0 and rest or nil)
  end
end

-- Prune up to two jobs for each verdict of this step, and two more: so pruning keeps up with the jobs that end.
function prune_a_little(x)
  if #x.verdicts == 0 then return end
  local most = 2 * #x.verdicts + 2
  prune(most, next(flows.links) and most, next(limits.partitions) and most)
end

end
