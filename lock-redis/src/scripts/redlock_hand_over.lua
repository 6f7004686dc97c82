local wait = young()
if wait then
    return { 'lost', 'young', stamp, wait }
end
