-- The server's memory: choose what a step may still keep when `maxmemory` is near.
--
-- A full server refuses a step that has something to keep, before the step does anything. The client then
-- repeats the step by `exchange_pressed`, which prunes finished jobs early. Results, tracebacks and log
-- lines without room are not kept; outcomes are. A large step also looks for room on a server that is not
-- full yet.

do

local NOT_KEPT = '\199\0\13' -- RESULT_NOT_KEPT of job.py
local LARGE = 65536 -- bytes: a smaller step is kept without a look at the free memory
local OVERHEAD = 100 -- bytes that each kept item takes besides its own
local SHORT = 500 -- bytes of an error that are kept in any case
local ROUNDS, AT_ONCE = 4, 125 -- rounds of early pruning, and jobs of each class in a round
local FRESH = 5000000 -- microseconds in which a caller that waited for a job reads it

-- Bytes until the server is full, and the bytes that it may use; nil without a bound.
local function left()
  local info = redis.pcall('INFO', 'memory')
  if type(info) ~= 'string' then return Memory.pressed and 0 or nil, 0 end -- the URL's user may not call INFO
  local function fact(name) return tonumber(string.match(info, name .. ':(%d+)') or 0) end
  local most = fact('maxmemory')
  if most == 0 then return nil end
  return most - fact('used_memory') + fact('mem_not_counted_for_evict'), most
end

-- Forget some of the oldest finished jobs before their time: jobs without a result first. Failed jobs and results that
-- are still protected stay. Returns the number of jobs.
local function prune_early()
  local _, _, _, protect = unpk('>dddd', ARGV[2])
  return Memory.prune_early(0, FRESH, AT_ONCE) + Memory.prune_early(1, protect, AT_ONCE)
end

-- Prune early until 1/32 of all memory is free, if pruning can do that. Returns the free bytes.
local function relieve()
  local bytes, most = left()
  local round = 0
  while bytes and bytes < most / 32 and round < ROUNDS and prune_early() > 0 do
    flush()
    bytes, round = left(), round + 1
  end
  return bytes
end

-- The beginning of a text, in whole characters of UTF-8.
local function cut(text)
  local last = math.min(#text, SHORT)
  while last < #text and last > 0 and bit.band(byte(text, last + 1), 0xC0) == 0x80 do last = last - 1 end
  return sub(text, 1, last)
end

local function size_of_verdict(v) return #v.result + #v.error + #v.traceback end

-- Cut from verdicts and notes all that has no room; `short` marks a verdict whose result is not kept.
function Memory.fit(verdicts, notes)
  local size, bytes = 0, nil
  for _, v in ipairs(verdicts) do size = size + size_of_verdict(v) end
  for _, n in ipairs(notes) do size = size + #n[5] + #n[6] end
  if Memory.pressed and not is_sealed() then
    bytes = relieve()
  elseif Memory.pressed or size > LARGE then
    bytes = left()
  end
  if not bytes then return end
  local function fits(more)
    if bytes < more + OVERHEAD then return false end
    bytes = bytes - more - OVERHEAD
    return true
  end
  for _, v in ipairs(verdicts) do
    if not fits(size_of_verdict(v)) then
      v.error, v.traceback = cut(v.error), ''
      if #v.result > #NOT_KEPT then v.result, v.short = NOT_KEPT, true end
    end
  end
  for _, n in ipairs(notes) do
    for k = 5, 6 do
      if n[k] ~= '' and not fits(#n[k]) then n[k] = '' end
    end
  end
end

-- Change '1' to '2' for each settled verdict whose result was not kept.
function Memory.mark_not_kept(settled, verdicts)
  for i, v in ipairs(verdicts) do
    if v.short and settled[i] == '1' then settled[i] = '2' end
  end
end

end
